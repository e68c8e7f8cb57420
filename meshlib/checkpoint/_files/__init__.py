"""A checkpoint's files: storages, folders, documents of Zarr, chunks."""
