"""A stage replica's side of a journey: admission, computing, handing on, taking over."""
