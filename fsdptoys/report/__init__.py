"""What runs and sweeps have left behind, side by side: tables, pictures and comparisons."""
