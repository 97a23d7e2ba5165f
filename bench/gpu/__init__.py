"""The GPU day: all measurements that need a GPU, in parts that are independent of each other."""
