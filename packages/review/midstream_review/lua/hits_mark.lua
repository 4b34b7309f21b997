-- Mark a hit, or take its mark back. Marked hits do not count among the newest that are kept; as many of them are kept.
-- args: policy (model:name), id, mark (JSON, or nil), kept (the most marked hits)
-- returns 'unknown' | 'full' | 'marked'
local record, all, unmarked = hit_key(args.policy, args.id), hit_lists(args.policy)
local at = redis.call('HGET', record, 'at')
if not at then
  return 'unknown'
end
if not args.mark then
  redis.call('HDEL', record, 'mark')
  redis.call('ZADD', unmarked, at, args.id)
  return 'marked'
end
if redis.call('HEXISTS', record, 'mark') == 0 and redis.call('ZCARD', all) - redis.call('ZCARD', unmarked) >= args.kept then
  return 'full'
end
redis.call('HSET', record, 'mark', args.mark)
redis.call('ZREM', unmarked, args.id)
return 'marked'
