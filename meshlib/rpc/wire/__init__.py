"""How RPC's messages travel: payloads, frames, connections, memory of other processes, threads."""
