"""Published rules that compare times, and some of them paths. Our own objectives are beside this package."""
