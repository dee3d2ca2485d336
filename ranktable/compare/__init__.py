"""What tables say, apart from how they say it: the differences of two, and digests."""
