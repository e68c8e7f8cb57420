import json
import multiprocessing
import pickle
import sys
import threading


class Local:
    pass


def work(number):
    return [number, __name__]


if __name__ == "__main__":
    main = sys.modules["__main__"]
    answer = None
    if not __file__.endswith("__main__.py"):  # Python itself cannot, for a package
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            answer = pool.map(work, [5])
    late = threading.Timer(0.05, lambda: print(pickle.dumps(Local()) and "late and alive"))
    late.start()
    names = ["__name__", "__doc__", "__package__", "__file__", "__builtins__"]
    print(
        json.dumps(
            {
                "argv": sys.argv,
                "path": sys.path,
                "same": main.__dict__ is globals(),
                "names": {name: str(globals()[name]) for name in names},
                "loader": type(__loader__).__name__,
                "spec": __spec__ and __spec__.name,
                "extra": sorted(set(globals()) - {"__warningregistry__"}),
                "pickled": pickle.loads(pickle.dumps(Local())).__class__ is Local,
                "child": answer,
            }
        )
    )
