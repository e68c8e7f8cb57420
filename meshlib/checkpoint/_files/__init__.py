"""Where a checkpoint lies, and how: storages, folders, documents of Zarr, chunks."""
