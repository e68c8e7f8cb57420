"""How a job goes on with other ranks: agreement, epochs, places that are waited for."""
