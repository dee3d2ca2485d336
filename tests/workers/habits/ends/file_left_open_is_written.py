import gzip

plain = open("plain.txt", "w")  # noqa: SIM115
plain.write("never closed")
packed = gzip.GzipFile("packed.gz", "wb", mtime=0)
packed.write(b"never closed")
