/* SPDX-License-Identifier: GPL-2.0 */
/* The kernel's helpers over the maps of store.h. */
#include "store.h"

enum { MOST_MAPS = 64, MOST_VERDICTS = 32 };

static struct {
	const char *name;
	struct map *map;
} bound[MOST_MAPS];

unsigned long long now;
unsigned int dice;
int until_meanwhile;
void (*meanwhile)(void);

static __u64 netns, cookie;
static int returned;

void bind_map(int index, const char *name, struct map *map)
{
	bound[index].name = name;
	bound[index].map = map;
}

static struct map *find_map(const char *name)
{
	for (int i = 0; i < MOST_MAPS && bound[i].name; i++)
		if (!strcmp(bound[i].name, name))
			return bound[i].map;
	abort();
}

/* Whether an entry's prefix is one of the key's: 32 bits of length, then the bits. */
static int has_prefix(const unsigned char *entry, const unsigned char *key)
{
	__u32 length, asked;

	memcpy(&length, entry, 4);
	memcpy(&asked, key, 4);
	if (length > asked || memcmp(entry + 4, key + 4, length / 8))
		return 0;
	return !(length % 8) || !((entry[4 + length / 8] ^ key[4 + length / 8]) >> (8 - length % 8));
}

static int longest_prefix(const struct map *map, const unsigned char *key)
{
	__u32 longest = 0, length;
	int found = -1;

	for (int i = 0; i < map->places; i++) {
		if (!map->taken[i] || !has_prefix(map->keys + i * map->key_size, key))
			continue;
		memcpy(&length, map->keys + i * map->key_size, 4);
		if (found < 0 || length > longest)
			longest = length, found = i;
	}
	return found;
}

void *bpf_map_lookup_elem(void *name, const void *key)
{
	struct map *map = find_map(name);

	if (until_meanwhile > 0 && !--until_meanwhile)
		meanwhile();
	if (map->kind == KIND_LPM) {
		int place = longest_prefix(map, key);

		return place < 0 ? NULL : map_at(map, place);
	}
	return map_lookup(map, key);
}

long bpf_map_update_elem(void *name, const void *key, const void *value, __u64 flags)
{
	return map_update(find_map(name), key, value, flags);
}

long bpf_map_delete_elem(void *name, const void *key)
{
	return map_delete(find_map(name), key);
}

/* Nobody reads rings here. */
long bpf_ringbuf_output(void *ring, void *data, __u64 size, __u64 flags)
{
	return 0;
}

__u64 bpf_ktime_get_ns(void)
{
	return now;
}

/* Four milliseconds each, as with CONFIG_HZ=250. */
__u64 jiffies64(void)
{
	return now / 4000000;
}

__u32 bpf_get_prandom_u32(void)
{
	return dice = dice * 1664525u + 1013904223u;
}

__u32 bpf_get_smp_processor_id(void)
{
	return 0;
}

__u64 get_netns_cookie(void *ctx)
{
	return ctx ? netns : 1;
}

__u64 get_socket_cookie(void *ctx)
{
	return cookie;
}

int set_retval(int retval)
{
	returned = retval;
	return 0;
}

/* No simulated socket has states in between: hooks/socket_opening.c never runs. */
int bpf_sock_ops_cb_flags_set(struct bpf_sock_ops *ctx, int flags)
{
	return 0;
}
