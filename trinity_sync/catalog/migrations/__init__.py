"""Migrations of the catalog's schema."""
