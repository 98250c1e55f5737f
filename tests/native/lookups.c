/* SPDX-License-Identifier: GPL-2.0 */
/* Look-ups of bpf/path/ as functions that Python can call, beside the hooks. */
#include "hooks/socket.c"

int lookup_service(const void *frontend, __u64 netns, void *service)
{
	return service_find(frontend, netns, service) == FOUND;
}

int lookup_backend(__u32 service, __u32 id, void *backend)
{
	return backend_find(service, id, backend);
}
