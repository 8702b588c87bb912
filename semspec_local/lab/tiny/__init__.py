"""The embedded pair: two tiny Llamas, taught on problems of the made world."""
