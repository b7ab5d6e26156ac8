"""The manifests, and programs around them. Not installed with the rest."""
