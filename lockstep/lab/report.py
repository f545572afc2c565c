def page(doc): return ""
