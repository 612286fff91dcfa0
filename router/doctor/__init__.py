"""`tfirst doctor`: what a server says of itself, whether its cache events arrive, and which flag is missing."""
