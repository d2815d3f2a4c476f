"""Virtual hosts on one Linux machine: real SSH servers, own addresses, faults on demand."""
