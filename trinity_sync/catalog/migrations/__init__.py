"""The steps from one schema of the catalog to the next."""
