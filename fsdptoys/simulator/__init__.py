"""An imagined device: what its allocator would hold, and when its streams would be done with what they are given."""
