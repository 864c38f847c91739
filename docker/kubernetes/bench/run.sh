#!/bin/sh
# Times a pod's accelerator from inside the pod, and fetches the bundle.
#
#   docker/kubernetes/bench/run.sh POD FILE [TENSOR_PARALLEL] [OPTIONS OF gpuscore bench ...]
#
# With TENSOR_PARALLEL 0 the server of the pod is timed, with its first key. With 1 or more a server of
# its own is started, of $MODEL on so many devices, in a pod that runs none.
set -eu
[ $# -ge 2 ] || { sed -n 's/^#   //p' "$0" >&2; exit 2; }
pod=$1 file=$2 devices=${3:-0}
shift 2
[ $# -eq 0 ] || shift
namespace=${NAMESPACE:-gpuscore}
if [ "$devices" = 0 ]; then
  set -- --url http://127.0.0.1:8000 --key-file /etc/gpuscore/api-keys "$@"
else
  set -- --model "/models/${MODEL:?name the model, as the pod does}" \
    --serve "--tensor-parallel $devices" "$@"
fi
code=0
kubectl -n "$namespace" exec "$pod" -c server -- \
  gpuscore bench --output /tmp/bench.json "$@" || code=$?
kubectl -n "$namespace" exec "$pod" -c server -- cat /tmp/bench.json > "$file"
echo "wrote $file"
exit $code
