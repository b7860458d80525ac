"""Device code in Triton. The only folder that imports triton; its hosts import it when a kernel first runs."""
