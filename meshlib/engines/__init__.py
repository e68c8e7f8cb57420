"""Adapters for Ray and Dask, which import these libraries only when used."""
