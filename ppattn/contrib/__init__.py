"""Models of ppattn in other libraries; each file needs the library it is named after."""
