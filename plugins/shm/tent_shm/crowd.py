import threading
class Crowd:
    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
    def __enter__(self):
        with self._lock:
            self._inside += 1
            return self._inside > 1
    def __exit__(self, *_):
        with self._lock:
            self._inside -= 1
