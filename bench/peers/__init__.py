"""Other servers to measure against; none is a dependency, each gets a virtual environment of its own."""
