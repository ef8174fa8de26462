"""Self-checks of machines before a job, and of suspects after a failure; `msc doctor` runs them."""
