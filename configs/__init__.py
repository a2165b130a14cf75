"""Hydra configuration groups. A package, so that ``pkg://fsdptoys.configs`` finds the YAML files in
every install."""
