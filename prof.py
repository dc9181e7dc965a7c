import cProfile, pstats, sys
sys.argv=['x','fp8']
p=cProfile.Profile()
src=open('/tmp/h44/warm_count.py').read()
p.enable(); exec(compile(src,'wc','exec')); p.disable()
s=pstats.Stats(p); s.sort_stats('cumtime').print_stats(r'attnlib|recorded|stub|triton', 60)
s.sort_stats('tottime').print_stats(25)
