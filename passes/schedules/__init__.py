"""Pipeline schedules: rules of a few lines, and one list scheduler that turns them into orders."""
