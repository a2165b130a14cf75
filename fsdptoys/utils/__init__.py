"""Helpers without a package of their own: files, foreign text and what is printed."""
