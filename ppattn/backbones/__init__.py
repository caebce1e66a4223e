"""Hosts: each owns its geometry, and takes any mechanism of `ppattn.attention`."""
