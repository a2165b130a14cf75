"""Tables, figures and comparisons of recorded runs and sweeps."""
