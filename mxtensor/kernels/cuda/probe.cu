// A kernel that does nothing: how many clusters run at a time is asked of it.

KERNEL void probe() {}
