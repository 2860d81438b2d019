"""What runs did, from the files that they have left."""
