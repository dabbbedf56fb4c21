"""What families of several stages share: sizes, limits, copies between layouts."""
