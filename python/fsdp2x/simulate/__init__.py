"""One training step on paper: what a plan's schedule takes on machines that are not there."""
