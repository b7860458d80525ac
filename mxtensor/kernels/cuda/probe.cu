// An empty kernel: the driver says of it how many clusters run at a time.

KERNEL void probe() {}
