"""Proof on this machine that sharding changes nothing: a plain loop against every layout."""
