"""Ask a Triptych router about a picture over plain gRPC: nothing but `grpc` and the generated `protos`.

python examples/generate.py HOST:PORT "What is in the picture?" picture.jpg
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where `protos` is, if Triptych is not installed

from protos import common_pb2, router_pb2, router_pb2_grpc


def main(router: str, prompt: str, *image_paths: str) -> int:
    content = [common_pb2.ContentPart(image=common_pb2.ImagePart(data=Path(path).read_bytes())) for path in image_paths]
    content.append(common_pb2.ContentPart(text=common_pb2.TextPart(text=prompt)))
    request = router_pb2.GenerateRequest(
        chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=content)]),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=64),
    )
    with grpc.insecure_channel(router) as channel:
        try:
            # The deadline reaches every stage; leaving the loop early would cancel the request there as well.
            for response in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=60):
                print(response.text, end="", flush=True)
                if response.HasField("finished"):
                    usage = response.finished.usage
                    print(f"\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated")
        except grpc.RpcError as error:
            print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
