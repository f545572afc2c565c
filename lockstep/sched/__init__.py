"""Who computes what next: requests, their order, and the steps they share. Host only: no tensor, no
torch."""
