"""Device code in Triton. Only this folder imports triton; host code imports a file of it when a kernel first runs."""
