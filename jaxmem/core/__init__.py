"""What every verb shares: the maths of a row, a call's static facts, its devices."""
