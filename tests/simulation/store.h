/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Maps in memory, with the kernel's semantics. What a look-up returned stays where it is; what is
 * replaced or deleted is overwritten at once, the worst that recycling can do to a reader.
 */
#include <errno.h>
#include <linux/bpf.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { GARBAGE = 0xA5, SPARE = 8 };
enum { KIND_HASH = 1, KIND_ARRAY = 2, KIND_PERCPU_ARRAY = 6, KIND_LRU = 9, KIND_LPM = 11 };

struct map {
	int kind, key_size, value_size, entries, stride, places, used, next;
	unsigned char *keys, *values, *taken;	/* taken: 0, or a number that its key has */
	unsigned long long *added, *touched;	/* when, by `events` */
};

static unsigned long long events;

static int is_array(const struct map *map)
{
	return map->kind == KIND_ARRAY || map->kind == KIND_PERCPU_ARRAY;
}

struct map *map_new(int kind, int key_size, int value_size, int entries)
{
	struct map *map = calloc(1, sizeof(*map));

	map->kind = kind;
	map->key_size = key_size;
	map->value_size = value_size;
	map->entries = entries;
	map->stride = (value_size + 7) / 8 * 8;
	map->places = is_array(map) ? entries : entries + SPARE;
	map->keys = calloc(map->places, key_size);
	map->values = calloc(map->places, map->stride);
	map->taken = calloc(map->places, 1);
	map->added = calloc(map->places, sizeof(*map->added));
	map->touched = calloc(map->places, sizeof(*map->touched));
	return map;
}

void map_free(struct map *map)
{
	free(map->keys);
	free(map->values);
	free(map->taken);
	free(map->added);
	free(map->touched);
	free(map);
}

static unsigned char mark_of(const struct map *map, const unsigned char *key)
{
	unsigned int sum = 0;

	for (int i = 0; i < map->key_size; i++)
		sum = sum * 31 + key[i];
	return sum % 255 + 1;
}

static int place_of(const struct map *map, const void *key)
{
	unsigned char mark, *found;
	__u32 index;

	if (is_array(map)) {
		memcpy(&index, key, sizeof(index));
		return index < (__u32)map->entries ? (int)index : -1;
	}
	mark = mark_of(map, key);
	for (int i = 0; (found = memchr(map->taken + i, mark, map->places - i)); i++) {
		i = found - map->taken;
		if (!memcmp(map->keys + i * map->key_size, key, map->key_size))
			return i;
	}
	return -1;
}

void *map_at(struct map *map, int place)
{
	return map->values + (size_t)place * map->stride;
}

void *map_lookup(struct map *map, const void *key)
{
	int place = place_of(map, key);

	if (place >= 0)
		map->touched[place] = ++events;
	return place < 0 ? NULL : map_at(map, place);
}

static void retire(struct map *map, int place)
{
	memset(map_at(map, place), GARBAGE, map->value_size);
	map->taken[place] = 0;
	map->used--;
}

int map_delete(struct map *map, const void *key)
{
	int place = is_array(map) ? -1 : place_of(map, key);

	if (place < 0)
		return is_array(map) ? -EINVAL : -ENOENT;
	retire(map, place);
	return 0;
}

static int free_place(struct map *map)
{
	do
		map->next = (map->next + 1) % map->places;
	while (map->taken[map->next]);
	return map->next;
}

static int least_recently_used(const struct map *map)
{
	int found = -1;

	for (int place = 0; place < map->places; place++)
		if (map->taken[place] && (found < 0 || map->touched[place] < map->touched[found]))
			found = place;
	return found;
}

int map_update(struct map *map, const void *key, const void *value, int flags)
{
	int place = place_of(map, key);

	if (is_array(map)) {
		if (place < 0)
			return -E2BIG;
		memcpy(map_at(map, place), value, map->value_size);
		return 0;
	}
	if (place >= 0 && flags == BPF_NOEXIST)
		return -EEXIST;
	if (place < 0 && flags == BPF_EXIST)
		return -ENOENT;
	if (place < 0 && map->used == map->entries) {
		if (map->kind != KIND_LRU)
			return -E2BIG;
		place = least_recently_used(map);
	}
	if (place >= 0)
		retire(map, place);
	place = free_place(map);
	memcpy(map->keys + place * map->key_size, key, map->key_size);
	memcpy(map_at(map, place), value, map->value_size);
	map->taken[place] = mark_of(map, key);
	map->added[place] = map->touched[place] = ++events;
	map->used++;
	return 0;
}

/* What a hash got after `since` is removed. */
static void map_forget(struct map *map, unsigned long long since)
{
	for (int place = 0; place < map->places; place++)
		if (map->taken[place] && map->added[place] > since)
			retire(map, place);
}

/* The place of the next entry of a hash from this one on, or -1. */
int map_next(const struct map *map, int place)
{
	while (place < map->places && !map->taken[place])
		place++;
	return place < map->places ? place : -1;
}

const void *map_key(const struct map *map, int place)
{
	return map->keys + place * map->key_size;
}

/* All entries of a hash, one after the other; returns how many. */
int map_dump(const struct map *map, unsigned char *keys, unsigned char *values)
{
	int count = 0;

	for (int place = map_next(map, 0); place >= 0; place = map_next(map, place + 1)) {
		memcpy(keys + count * map->key_size, map_key(map, place), map->key_size);
		memcpy(values + count * map->value_size, map->values + place * map->stride,
		       map->value_size);
		count++;
	}
	return count;
}
