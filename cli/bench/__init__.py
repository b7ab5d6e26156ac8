"""`triptych bench`: open-loop load against an OpenAI-compatible server or a Triptych router.

load.py makes the requests and their times, http_target.py and grpc_target.py send one, report.py counts.
"""
