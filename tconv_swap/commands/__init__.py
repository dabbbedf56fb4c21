"""The commands beside `swap` and `demo`, one a file."""
