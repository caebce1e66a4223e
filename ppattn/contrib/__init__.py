"""Models of ppattn inside other programs; each file needs the program that it is named after."""
