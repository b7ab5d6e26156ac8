"""Programs around the manifests: `make image` and `make cluster-check`. Tests use what reads them."""
