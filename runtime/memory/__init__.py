"""Memory of a rank: predicted from its graphs, and counted while a program runs."""
