/* SPDX-License-Identifier: GPL-3.0-or-later
 * A small JSON reader for the stand-in NVML library: objects, arrays, strings (with escapes, BMP only),
 * numbers, true, false and null. Whoever calls json_parse owns the tree and frees it with json_free. */
#ifndef REHEARSAL_JSON_H
#define REHEARSAL_JSON_H

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum json_kind { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

typedef struct json {
    enum json_kind kind;
    char *key;          /* set for a member of an object */
    char *text;         /* JSON_STRING */
    double number;      /* JSON_NUMBER, JSON_BOOL */
    struct json *child; /* first member or element */
    struct json *next;
} json;

static void json_free(json *node) {
    while (node) {
        json *next = node->next;
        json_free(node->child);
        free(node->key);
        free(node->text);
        free(node);
        node = next;
    }
}

static const char *json_space(const char *p) {
    while (*p && isspace((unsigned char)*p)) p++;
    return p;
}

static char *json_read_string(const char **at) {
    const char *p = *at + 1;
    char *out = malloc(strlen(p) + 1), *o = out;
    if (!out) return NULL;
    while (*p && *p != '"') {
        if (*p != '\\') { *o++ = *p++; continue; }
        p++;
        switch (*p) {
        case 'n': *o++ = '\n'; p++; break;
        case 't': *o++ = '\t'; p++; break;
        case 'r': *o++ = '\r'; p++; break;
        case 'b': *o++ = '\b'; p++; break;
        case 'f': *o++ = '\f'; p++; break;
        case 'u': {
            char digits[5] = {0};
            unsigned code;
            size_t n = 0;
            for (p++; n < 4 && isxdigit((unsigned char)*p); n++) digits[n] = *p++;
            if (n != 4) { free(out); return NULL; }
            code = (unsigned)strtoul(digits, NULL, 16);
            if (code < 0x80) { *o++ = (char)code; }
            else if (code < 0x800) { *o++ = (char)(0xc0 | code >> 6); *o++ = (char)(0x80 | (code & 0x3f)); }
            else {
                *o++ = (char)(0xe0 | code >> 12);
                *o++ = (char)(0x80 | (code >> 6 & 0x3f));
                *o++ = (char)(0x80 | (code & 0x3f));
            }
            break;
        }
        case '\0': free(out); return NULL;
        default: *o++ = *p++; break; /* quote, backslash, slash */
        }
    }
    if (*p != '"') { free(out); return NULL; }
    *o = '\0';
    *at = p + 1;
    return out;
}

static json *json_read(const char **at, int depth) {
    const char *p = json_space(*at);
    json *node;
    if (depth > 32 || !(node = calloc(1, sizeof *node))) return NULL;
    if (*p == '{' || *p == '[') {
        int object = *p == '{';
        char end = object ? '}' : ']';
        json **tail = &node->child;
        node->kind = object ? JSON_OBJECT : JSON_ARRAY;
        p = json_space(p + 1);
        while (*p != end) {
            char *key = NULL;
            json *item;
            if (object) {
                if (*p != '"' || !(key = json_read_string(&p))) goto bad;
                p = json_space(p);
                if (*p != ':') { free(key); goto bad; }
                p++;
            }
            if (!(item = json_read(&p, depth + 1))) { free(key); goto bad; }
            item->key = key;
            *tail = item;
            tail = &item->next;
            p = json_space(p);
            if (*p == ',') { p = json_space(p + 1); if (*p == end) goto bad; }
            else if (*p != end) goto bad;
        }
        p++;
    } else if (*p == '"') {
        node->kind = JSON_STRING;
        if (!(node->text = json_read_string(&p))) goto bad;
    } else if (!strncmp(p, "true", 4)) {
        node->kind = JSON_BOOL; node->number = 1; p += 4;
    } else if (!strncmp(p, "false", 5)) {
        node->kind = JSON_BOOL; p += 5;
    } else if (!strncmp(p, "null", 4)) {
        p += 4;
    } else {
        char *end;
        node->kind = JSON_NUMBER;
        node->number = strtod(p, &end);
        if (end == p) goto bad;
        p = end;
    }
    *at = p;
    return node;
bad:
    json_free(node);
    return NULL;
}

static json *json_parse(const char *text) {
    json *node = json_read(&text, 0);
    if (node && *json_space(text)) { json_free(node); return NULL; }
    return node;
}

static json *json_parse_file(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    size_t used = 0, room = 0, got;
    json *node = NULL;
    if (!file) return NULL;
    do {
        if (room - used < 4096) {
            char *more = realloc(text, room += 16384);
            if (!more) { free(text); fclose(file); return NULL; }
            text = more;
        }
        got = fread(text + used, 1, room - used - 1, file);
        used += got;
    } while (got);
    fclose(file);
    text[used] = '\0';
    node = json_parse(text);
    free(text);
    return node;
}

static const json *json_get(const json *object, const char *key) {
    const json *item = object && object->kind == JSON_OBJECT ? object->child : NULL;
    for (; item; item = item->next)
        if (!strcmp(item->key, key)) return item->kind == JSON_NULL ? NULL : item;
    return NULL;
}

static const char *json_text(const json *object, const char *key, const char *otherwise) {
    const json *item = json_get(object, key);
    return item && item->kind == JSON_STRING ? item->text : otherwise;
}

#endif
