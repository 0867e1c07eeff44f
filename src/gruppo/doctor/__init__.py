"""What ails a run, from the files that it left: what was measured, what it means, what to change by how much."""
