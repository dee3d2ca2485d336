from multiprocessing import shared_memory

if __name__ == "__main__":
    kept = shared_memory.SharedMemory(create=True, size=16)
    kept.buf[:2] = b"ab"
    again = shared_memory.SharedMemory(kept.name)
    print(bytes(again.buf[:2]))
    again.close()
    kept.close()
    kept.unlink()
