//! Which table rows a token reads.

use graph::Ptr;
use half::bf16;
use kernels::hash::Constants;
use kernels::ngram::{GatherArgs, NgramGather};
use kernels::numerics::Element;
use kernels::state::RowRange;
use kernels::table::{Fact, PREVIOUS};
use tests::check::{Draw, Scene, facts, poisoned, same};

tests::tests! {
    any: rows_are_gathered_in_bf16;
    host: the_rows_of_the_reference, every_n_gram_size_by_its_definition, rows_are_gathered_in_f32, a_row_past_the_table_is_refused;
}

const BOUNDARY: u32 = 248_044;
const MULTIPLIERS: [u64; 3] = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
const PRIMES: [u64; 16] = [
    20_000_003, 20_000_023, 20_000_033, 20_000_047, 20_000_059, 20_000_063, 20_000_069, 20_000_077,
    20_000_081, 20_000_093, 20_000_107, 20_000_147, 20_000_153, 20_000_159, 20_000_161, 20_000_171,
];
const PER_NGRAM: usize = 8;

/// A sequence from its start: every id with the rows of its 16 heads, as the reference implementation
/// computes them. Source: MODEL, test vectors.
const SEQUENCE: &str = "
1: 16121432 28938500 59087997 73487090 81148277 104500129 120276032 149373875
    176283436 184305849 216528839 231080079 257961536 266068568 289043455 305959965
1000: 18188074 34686009 52952758 74546108 84501725 107824115 122811195 149467298
    168928873 195349780 218005115 222170770 249184118 276559644 292432023 312397055
151: 9056385 20396066 56081951 66060058 88915113 103203567 124639452 153226616
    166201305 192597646 206746051 221570802 244809387 268051818 295800310 314548214
248044: 18408052 23509837 40469161 65149644 82317651 108980843 129857256 146004902
    163779821 194495709 209011855 225077035 251541813 279064385 281806920 317282736
9: 18043673 37626835 51159316 78294604 94015356 106720349 136526052 144330141
    176817901 186368539 203707490 230017629 247662678 266533413 293096193 307951937
248044: 2701124 21500242 55309614 75581644 88972381 114376771 133365251 146996157
    165401374 190070589 200378572 238673325 251103114 264494349 289171909 314161324
248044: 9663979 26558231 56120240 74755659 80459717 109265651 132697467 151022725
    170054832 192967038 200687722 225763581 259275737 272983544 297596484 300986548
5: 15389869 39778609 55713969 62213332 88817728 118483999 133731511 155458159
    179763390 197956758 205378969 220499474 242466248 265658744 293662119 315720898
6: 15567690 35687509 55747620 67831959 83904455 115928743 123965091 148013673
    164414634 193473829 212527239 232037623 240342494 269007074 298641997 307414745
7: 9319853 32980418 54810932 61373850 95570932 100303321 137402047 146866965
    160487518 192851935 200610520 228493582 254676383 260859079 296253588 313224935
248056: 7033384 20387938 51475208 79936525 86061095 102376779 127732299 143185974
    161667687 185649550 202312390 235957534 249061475 263223798 294846649 314723757
248056: 16982399 34740182 54733895 75973670 98195745 119174304 120865008 143535541
    175808735 187243677 215270518 231945093 240471962 269266548 285590923 307658255
248056: 16982399 34740182 54733895 75973670 98195745 119174304 120865008 143535541
    168080783 195121389 200991716 226494397 242070342 277842220 296476407 309972988
248054: 16752472 37437132 48894252 66182782 82160902 107724825 136293644 148134836
    175511103 185059439 203855690 237718561 244548527 271574438 280626585 306213479
";

fn offsets(primes: &[u64]) -> Vec<u64> {
    primes.iter().scan(0, |sum, prime| Some(std::mem::replace(sum, *sum + prime))).collect()
}

fn constants<'a>(
    heads_per_ngram: usize,
    multipliers: &'a [u64],
    primes: &'a [u64],
    offsets: &'a [u64],
) -> Constants<'a> {
    Constants { boundary: BOUNDARY, heads_per_ngram, multipliers, primes, offsets }
}

/// The ids before position `t`, nearest first, the boundary where there is none.
fn previous(ids: &[u32], t: usize) -> [u32; PREVIOUS] {
    std::array::from_fn(|s| t.checked_sub(s + 1).map_or(BOUNDARY, |at| ids[at]))
}

fn the_rows_of_the_reference() {
    let words: Vec<&str> = SEQUENCE.split_whitespace().collect();
    let ids: Vec<u32> = words.iter().filter_map(|word| word.strip_suffix(':')?.parse().ok()).collect();
    assert_eq!(ids.len(), 14);
    let offsets = offsets(&PRIMES);
    for (t, line) in words.chunks(1 + PRIMES.len()).enumerate() {
        let want: Vec<u64> = line[1..].iter().map(|row| row.parse().expect("a row")).collect();
        let mut rows = [0; PRIMES.len()];
        let hash = constants(PER_NGRAM, &MULTIPLIERS, &PRIMES, &offsets);
        hash.rows(ids[t], &previous(&ids, t), &mut rows);
        assert_eq!(rows[..], want, "position {t}");
    }
}

/// The rows by the definition: every predecessor on its own, arithmetic in 128 bits.
fn by_definition(ids: &[u32], t: usize, multipliers: &[u64], primes: &[u64], per_ngram: usize) -> Vec<u64> {
    let offsets = offsets(primes);
    let at = |s: usize| t.checked_sub(s).map_or(BOUNDARY, |at| ids[at]);
    let seen = |s: usize| if (1..s).any(|between| at(between) == BOUNDARY) { BOUNDARY } else { at(s) };
    let mix = |n: usize| (0..n).fold(0, |x, s| x ^ (u128::from(seen(s)) * u128::from(multipliers[s])));
    let head = |h: usize| (mix(h / per_ngram + 2) % u128::from(primes[h])) as u64 + offsets[h];
    (0..primes.len()).map(head).collect()
}

fn every_n_gram_size_by_its_definition() {
    let mut draw = Draw::new(1);
    let ids: Vec<u32> = (0..200)
        .map(|_| if draw.below(4) == 0 { BOUNDARY } else { draw.below(BOUNDARY as usize) as u32 })
        .collect();
    for size in 2..=PREVIOUS + 1 {
        for per_ngram in [1, 3] {
            let multipliers: Vec<u64> = (0..size).map(|_| 2 * draw.below(1 << 43) as u64 + 1).collect();
            let primes: Vec<u64> =
                (0..(size - 1) * per_ngram).map(|h| [101, 211, 20_000_003][h % 3]).collect();
            let offsets = offsets(&primes);
            for (t, id) in ids.iter().enumerate() {
                let mut rows = vec![0; primes.len()];
                let hash = constants(per_ngram, &multipliers, &primes, &offsets);
                hash.rows(*id, &previous(&ids, t), &mut rows);
                assert_eq!(rows, by_definition(&ids, t, &multipliers, &primes, per_ngram), "{size} at {t}");
            }
        }
    }
}

const WIDTH: usize = 5;
const SMALL_PRIMES: [u64; 4] = [11, 13, 17, 19];

/// A gather over a small table, behind `first` rows of others.
fn gather<E: Element>(first: usize, ids: &[u32], table: &[E], scene: &mut Scene) -> GatherArgs {
    let mut facts: Vec<Fact> = facts(&[(1, first), (0, ids.len())]);
    for (t, id) in ids.iter().enumerate() {
        facts[first + t] = Fact { id: *id, previous: previous(ids, t), ..facts[first + t] };
    }
    let table_rows = (table.len() / WIDTH) as u64;
    // A small table lies in one shard, a large one in four that are anywhere.
    let shard_rows = if table_rows.is_multiple_of(4) { table_rows / 4 } else { table_rows };
    let shards = table.chunks(shard_rows as usize * WIDTH).enumerate();
    let shards: Vec<Ptr<u8>> =
        shards.map(|(number, shard)| scene.input(&format!("shard {number}"), shard).cast()).collect();
    GatherArgs {
        rows: RowRange { facts: scene.input("facts", &facts), first: first as u32, count: ids.len() as u32 },
        multipliers: scene.input("multipliers", &MULTIPLIERS),
        primes: scene.input("primes", &SMALL_PRIMES),
        offsets: scene.input("offsets", &offsets(&SMALL_PRIMES)),
        shards: scene.addresses("shards", &shards),
        e: scene.output::<E>("e", (first + ids.len()) * 4 * WIDTH).cast(),
        table_rows,
        shard_rows,
        width: WIDTH as u32,
        ngram_size: 3,
        heads_per_ngram: 2,
        boundary: BOUNDARY,
        scales: Ptr::NULL,
        global: 1.0,
        zero: 0,
    }
}

fn gathers<E: Element>() {
    let mut draw = Draw::new(2);
    let table: Vec<E> = draw.elements(60 * WIDTH, 1.0);
    for rows in [1, 2, 3, 64, 65] {
        let first = rows % 3;
        let ids: Vec<u32> =
            (0..rows).map(|_| if draw.below(4) == 0 { BOUNDARY } else { draw.below(1000) as u32 }).collect();
        let mut scene = Scene::new();
        let args = gather(first, &ids, &table, &mut scene);
        scene.run::<NgramGather<E>>(&args);
        let e = scene.read(args.e.cast::<E>(), (first + rows) * 4 * WIDTH);
        poisoned("rows before the range", &e[..first * 4 * WIDTH]);
        let want: Vec<E> = (0..rows)
            .flat_map(|t| by_definition(&ids, t, &MULTIPLIERS, &SMALL_PRIMES, 2))
            .flat_map(|row| table[row as usize * WIDTH..][..WIDTH].to_vec())
            .collect();
        same("e", &e[first * 4 * WIDTH..], &want);
    }
}

fn rows_are_gathered_in_f32() {
    gathers::<f32>();
}

fn rows_are_gathered_in_bf16() {
    gathers::<bf16>();
}

fn a_row_past_the_table_is_refused() {
    let mut scene = Scene::new();
    let table = [0f32; 2 * WIDTH];
    let args = gather(0, &[7, 8], &table, &mut scene);
    let why = scene.domain_fault::<NgramGather<f32>>(&args);
    assert!(why.contains("of a table of 2 rows"), "{why}");
}
