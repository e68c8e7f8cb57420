"""Adapters for engines that have a library of their own; nothing here is imported unless used."""
